package manager

import (
	"os"
	"testing"

	"gpu-cdi-plugin/test/lib/suite"
)

var shared *suite.Suite

func TestMain(m *testing.M) {
	if len(os.Args) == 6 && os.Args[1] == holder {
		os.Exit(hold(os.Args[2], os.Args[3], os.Args[4], os.Args[5]))
	}
	os.Exit(suite.Run(m, &shared))
}
