// Package e2e has the end-to-end tests: simulated nodes, the built programs, real engines. The oracle of most is
// nvidia-smi in the container, which lists the GPUs that the driver's library can open there.
package e2e

import (
	"os"
	"testing"

	"gpu-cdi-plugin/test/lib/suite"
)

var shared *suite.Suite

func TestMain(m *testing.M) { os.Exit(suite.Run(m, &shared)) }
