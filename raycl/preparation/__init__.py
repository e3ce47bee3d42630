"""What is done once with a set, so that many runs read it well."""
