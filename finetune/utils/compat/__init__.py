"""All uses of private names of libraries, a module for each library: what to read when one of them is updated."""
