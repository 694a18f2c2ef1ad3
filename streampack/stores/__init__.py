"""Object stores: list, look up, read, write and remove objects, with retries and a deadline.

In: URLs. Out: bytes, files and `StoredObject`s, or a DataError with the URL, the cause and a way
out. May import the ground only. boto3 speaks to S3, fsspec to all other stores; the first URL of
a process imports them. Clients belong to one process, and a forked child makes its own.

Cost: 0.5 s for the first URL, 50 ms for a client; a thread for each attempt, about 0.1 ms.
"""
