"""Commands that write a model in another form, or read one."""
