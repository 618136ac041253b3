"""What a run will take, before it starts: memory, time, and the number of steps that fit."""
