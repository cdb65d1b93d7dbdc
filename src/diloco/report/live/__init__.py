"""The live view of `diloco watch`: runs and stores that are looked at again and again."""
