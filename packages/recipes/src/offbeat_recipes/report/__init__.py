"""What a run did, as one page: read from its folder, written as one file, or served while the run goes on."""
