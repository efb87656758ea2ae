// Package suites runs the engines of newer Debian suites on a simulated node. docs/engines.md has what each of them
// does.
package suites

import (
	"os"
	"testing"

	"gpu-cdi-plugin/test/lib/suite"
)

var shared *suite.Suite

func TestMain(m *testing.M) { os.Exit(suite.Run(m, &shared)) }
