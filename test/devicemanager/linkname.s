// The compiler allows functions without a body, as newManager is, only beside a file of assembler.
