"""A link, a device and a clock that are not there: what a step would do on given hardware."""
