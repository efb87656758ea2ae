// Package dist tests what a release consists of: the launcher of the image, the image, and the packages.
package dist

import (
	"log"
	"os"
	"testing"

	"gpu-cdi-plugin/test/lib/suite"
)

var (
	shared *suite.Suite
	// tempDir has what all tests share. It is removed at the end.
	tempDir string
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	var err error
	if tempDir, err = os.MkdirTemp("", "dist-"); err != nil {
		log.Print(err)
		return 1
	}
	defer os.RemoveAll(tempDir)
	return suite.Run(m, &shared)
}
