"""What a person, or whoever reads a bug report, needs to know of a discovery: sentences, and one document."""
