"""What is judged: the subject, its kinds and facts, the sizes and inputs it is called with, and the paths it offers."""
