"""`pytest --veriformer TARGET`: the judgements of `veriformer check`, one test a property and subject.

    plugin   what every pytest run loads: options, nothing else until they are used
       |
     asked   what was asked for: options, [tool.veriformer], ids of rows among the arguments
       |
      door --- rows ------- judging    the subjects and their rows, judged in processes of their own
       |         |
    counting   failing                 the last lines of a run; what a failure says

`handing_out` gives each worker of pytest-xdist whole subjects. No process of pytest imports torch or a subject's code.
"""
