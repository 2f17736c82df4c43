"""What is found out about a subject that declares nothing: by calling it, and by looking at its parts."""
