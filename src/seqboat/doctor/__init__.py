"""What `seqboat doctor` checks: this machine, every heavy operation on it, and the speed of a layer."""
