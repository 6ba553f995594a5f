"""Where pictures come from: folders, zips, shards, data sets on disk."""
