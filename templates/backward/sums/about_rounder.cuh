// Another one rounds dq once it is done.
