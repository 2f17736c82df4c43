"""Who talks to whom across processes.

    check, identify, replay --- asking ---(a pipe: question, answer)--- answering --- properties
                                   |
                                template   one process with torch imported; all others are copies of it
                                   |
    sweep, mutants ------------- apart ---(one call, one row)---------- sweeping, tests.mutants.judging
                                   |
                              judged_store   rows on disk: an interrupted command goes on

`asking` keeps a process while it answers and replaces it when it hangs or dies; `apart` gives each call a time limit.
What stands left of these arrows never imports torch nor the user's code.
"""
