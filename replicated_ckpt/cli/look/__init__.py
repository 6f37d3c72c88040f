"""What the command line sees of a store and of the nodes that it knows. Changes nothing."""
