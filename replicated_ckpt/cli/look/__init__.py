"""The view of a store and of the nodes in its address book, for the command line. Changes nothing."""
