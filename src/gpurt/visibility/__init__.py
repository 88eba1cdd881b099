"""Which devices the environment leaves visible, and the environment that shows a child exactly some of them. Pure.

Everything works on a mapping of variables and on :class:`~gpurt.visibility.candidates.Candidate` records; nothing reads
``os.environ``. :func:`~gpurt.visibility.resolve.resolve` answers the first question,
:func:`~gpurt.visibility.children.env_for` the second. Import them from there: a quick discovery needs neither.
"""
