// They do so in ping-pong: they take turns at the tensor cores.
