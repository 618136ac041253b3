"""Your own data: any of the inputs with any of the targets.

    inputs     text, symbols, tokens of a tokenizer, series of numbers, folders of sounds, images or texts
    targets    a class, several labels, a number, a tag for each token

`inputs` turns records into sequences, `targets` into what is learned and back into answers, `prepare` copies files to
arrays in bounded memory, and `task` joins them behind the contract of a task.
"""

import seqboat.tasks  # noqa: F401  (tables of tasks come first: they list these)
