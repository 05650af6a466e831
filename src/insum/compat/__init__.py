"""The only private names of torch that insum uses, each behind a check, by subject. Without them
every call goes through the registered op.
"""
