// Package dist tests what a release consists of: the launcher of the image, the image, and the packages.
package dist

import (
	"os"
	"testing"

	"gpu-cdi-plugin/test/lib/suite"
)

var shared *suite.Suite

func TestMain(m *testing.M) { os.Exit(suite.Run(m, &shared)) }
