//! What is out of a caller's scope is denied, or left out.
