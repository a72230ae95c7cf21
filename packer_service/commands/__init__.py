"""The commands, one a module. A module imports what only its command needs when that runs: a packer starts in half a second."""
