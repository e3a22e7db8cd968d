"""The bus between the processes of a cluster."""
