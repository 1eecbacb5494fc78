"""One study across machines: messages, sites, and what carries the messages between them."""
