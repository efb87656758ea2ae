// Command prestart-hook is an OCI hook: it prepares a container's root for the GPUs that the container was given.
package main

import "os"

// version is set when linking.
var version = "unknown"

func main() {
	os.Exit(int(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr)))
}
