"""One module per vendor library, each with one :class:`gpurt.driver.Driver`. Importing them loads no vendor library."""
