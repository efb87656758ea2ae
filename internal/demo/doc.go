// Package demo shows GPUs arriving in real containers: it builds a small root file system from the host's own files,
// runs nvidia-smi in it with an OCI runtime and with podman, and checks that each container saw exactly the GPUs that
// it was given.
//
// It is the one package of the product that starts other programs: the container engines that it demonstrates. It
// knows nothing of CDI or of the driver; who calls it says what to run and what is to be seen.
package demo
