"""Why a padding mask does not hide what it must."""
