"""Recognisers: from somebody's class, instance or function to a subject; one file a library, see `recognising`."""
