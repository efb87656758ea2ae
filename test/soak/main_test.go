// Package soak has tests of the built programs that take a while: random faults, exchanged files, processor time. Each
// has a flag that makes it last longer.
package soak

import (
	"os"
	"testing"

	"gpu-cdi-plugin/test/lib/suite"
)

var shared *suite.Suite

func TestMain(m *testing.M) { os.Exit(suite.Run(m, &shared)) }
