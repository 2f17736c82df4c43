"""What a failure is asked whose own property names no cause: measurements that speak of a whole kind of subject."""
