"""Models whose inputs or outputs are no sequence as it is: images, frames, two towers, own queries, one length."""
