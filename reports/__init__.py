"""Reports: from plain records to what a person or a program reads. Imports no other part of the project."""
