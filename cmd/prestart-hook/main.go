// Command prestart-hook is an OCI hook: it prepares a container's root for the GPUs that the container was given.
package main

import (
	"os"
	"time"

	"gpu-cdi-plugin/internal/exit"
)

// version is set when linking.
var version = "unknown"

func main() {
	// Where not even the message about the deadline can be written.
	time.AfterFunc(deadline+time.Second, func() { os.Exit(int(exit.Failure)) })
	os.Exit(int(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr)))
}
