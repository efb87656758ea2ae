package devcgroup

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"gpu-cdi-plugin/test/lib/engine"
)

var (
	host   = Host{Proc: "/proc", Dev: "/dev", Systemd: "/run/systemd/private"}
	images *engine.Images
)

// hookVariable makes this program a createRuntime hook, which calls hook with the variable's value.
const hookVariable = "DEVCGROUP_TEST_HOOK"

func TestMain(m *testing.M) {
	if does := os.Getenv(hookVariable); does != "" {
		if err := hook(does); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "devcgroup")
	if err != nil {
		log.Print(err)
		return 1
	}
	defer os.RemoveAll(dir)
	images = engine.NewImages(dir)
	return m.Run()
}

// gpu is the device that the tests allow. It has no driver, so opening it fails with ENXIO where it is allowed.
var gpu = Rule{Type: 'c', Major: 195, Minor: 7, Access: "rw"}

// hook is what a container's hook does: it reads the container's state and changes its cgroups.
func hook(does string) error {
	var state specs.State
	if err := json.NewDecoder(os.Stdin).Decode(&state); err != nil {
		return err
	}
	var last *Change
	for what := range strings.FieldsSeq(does) {
		var err error
		switch what {
		case "allow":
			last, err = Allow(context.Background(), host, state.Pid, []Rule{gpu})
		case "undo":
			err = last.Undo()
		}
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	return nil
}
