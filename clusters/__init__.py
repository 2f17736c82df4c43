"""Where calls run when one machine is too small: Dask, batch systems; and what is begun again when a worker dies."""
