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

	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/test/lib/engine"
)

var (
	host   = Host{Proc: "/proc", Cgroups: "/sys/fs/cgroup", Systemd: "/run/systemd/private"}
	images *engine.Images
)

// hookVariable makes this program a createRuntime hook, which allows the device for each word of the variable's value.
const hookVariable = "DEVCGROUP_TEST_HOOK"

func TestMain(m *testing.M) {
	if does, ok := os.LookupEnv(hookVariable); ok {
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

// hook is what a container's hook does: it reads the container's state and changes its cgroups, as often as it is said.
func hook(does string) error {
	var state specs.State
	if err := json.NewDecoder(os.Stdin).Decode(&state); err != nil {
		return err
	}
	for range strings.FieldsSeq(does) {
		if err := allow(context.Background(), host, state.Pid, gpu); err != nil {
			return err
		}
	}
	return nil
}

func allow(ctx context.Context, host Host, pid int, rules ...Rule) error {
	p, err := proc.Open(host.Proc, pid)
	if err != nil {
		return err
	}
	defer p.Close()
	cgroups, err := Find(host, p)
	if err != nil {
		return err
	}
	defer cgroups.Close()
	return cgroups.Allow(ctx, rules)
}
