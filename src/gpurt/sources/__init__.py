"""Blocking readers of what operating system and vendor management libraries say. No vendor import at module level."""
