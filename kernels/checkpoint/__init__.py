"""Weight files and configuration read within limits; canonical names; rotary scalings."""
