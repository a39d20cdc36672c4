"""A planning problem and its schedules as the searches read them."""
