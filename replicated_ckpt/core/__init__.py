"""PURE room: values in, value or typed error out. No I/O, clock, threads or torch may enter."""
