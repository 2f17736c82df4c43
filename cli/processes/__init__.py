"""Who talks to whom across processes.

    check, identify, replay --- asking ---(a pipe: question, answer)--- answering --- properties
                                   |
                                template   one process with torch imported; all others are copies of it
                                   |
    sweep, mutants ------------- apart ---(one call, one row)---------- sweeping, tests.mutants.judging
                                   |
                              judged_store   rows on disk: an interrupted command goes on

    check, sweep, mutants -- elsewhere ---(a cluster: chores)---------- hosting, which asks and judges apart there

`asking` keeps a process while it answers and replaces it when it hangs or dies; `apart` gives each call a time limit.
`elsewhere` has the faces of both for `--cluster`; `hosting` is their far side, a process beside each worker.
What stands left of these arrows never imports torch nor the user's code.
"""
