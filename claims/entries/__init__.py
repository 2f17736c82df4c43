"""The statements, one file a topic; each finds its numbers by a property, a study or a measurement of its own."""
