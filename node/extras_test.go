package node

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// newExtrasFixture returns a Reconciler of the extras on a node that has the named ones.
func newExtrasFixture(t *testing.T, has []string, extras ...Extra) *fixture {
	t.Helper()
	b := newFixtureOn(t, simtest.Node(t, "pcie-quad", simtest.Extras(has...)), func(o *Options) { o.Extras = extras })
	return b
}

var (
	gds      = Extra{Extra: driver.GDS}
	channel1 = Extra{Extra: driver.IMEX, Channels: []int{1}}
	required = Extra{Extra: driver.IMEX, Channels: []int{1}, Required: true}
)

func (b *fixture) channel() string {
	return filepath.Join(b.node.Root(), "dev/nvidia-caps-imex-channels/channel1")
}

// extras are the qualified names of the extras' devices in a state.
func extras(s State) []string {
	if len(s.Resources) == 0 || s.Resources[0].Grant == nil {
		return nil
	}
	return s.Resources[0].Grant.CDIDevices
}

func (b *fixture) hasExtras(want ...string) {
	b.t.Helper()
	if got := extras(b.rec.State()); !slices.Equal(got, want) {
		b.t.Errorf("the state has %v, want %v", got, want)
	}
	var disk []string
	for _, name := range cdi.Load(b.dirs...).Names() {
		if !strings.HasPrefix(name, cdi.DefaultKind+"=") {
			disk = append(disk, name)
		}
	}
	if !slices.Equal(disk, want) {
		b.t.Errorf("the specs on disk have %v, want %v", disk, want)
	}
}

func TestExtrasThatTheNodeHasAreInSpecsOfTheirOwn(t *testing.T) {
	b := newExtrasFixture(t, []string{"gds", "imex"}, gds, Extra{Extra: driver.GDRCopy}, channel1)
	b.start()
	b.wantDevices(b.rec.State(), count{healthy: 4})
	b.hasExtras("nvidia.com/gds=all", "nvidia.com/imex-channel=1")
}

func TestExtrasComeAndGo(t *testing.T) {
	b := newExtrasFixture(t, []string{"gds", "imex"}, gds, channel1)
	b.start()
	testenv.Must(t, os.Rename(b.channel(), b.channel()+".away"))
	b.wantDevices(b.reconcile(), count{healthy: 4})
	b.hasExtras("nvidia.com/gds=all")
	testenv.Must(t, os.Rename(b.channel()+".away", b.channel()))
	b.wantDevices(b.reconcile(), count{healthy: 4})
	b.hasExtras("nvidia.com/gds=all", "nvidia.com/imex-channel=1")
}

func TestRunNoticesExtras(t *testing.T) {
	for name, change := range map[string]func(b *fixture) error{
		"a channel goes":    func(b *fixture) error { return os.Remove(b.channel()) },
		"a spec is deleted": func(b *fixture) error { return os.Remove(filepath.Join(b.dirs[1], "nvidia.com-gds.json")) },
		"a spec is replaced": func(b *fixture) error {
			return os.WriteFile(filepath.Join(b.dirs[1], "nvidia.com-gds.json"), nil, 0o600)
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newExtrasFixture(t, []string{"gds", "imex"}, gds, channel1)
			b.rec.opts.Interval = 5 * time.Millisecond
			b.start()
			spec := filepath.Join(b.dirs[1], "nvidia.com-gds.json")
			ids := func() [2]fileio.ID {
				return [2]fileio.ID{fileio.IDOf(spec), fileio.IDOf(filepath.Join(b.dirs[1], "nvidia.com-imex-channel.json"))}
			}
			before := ids()
			b.run()
			testenv.Must(t, change(b))
			testenv.Eventually(t, "a spec is written", func() bool {
				_, err := cdi.ReadFile(spec)
				return err == nil && ids() != before
			})
		})
	}
}

func TestARequiredChannelThatIsMissing(t *testing.T) {
	b := newExtrasFixture(t, nil, required)
	err := b.rec.Start(t.Context(), b.publish)
	if err == nil ||
		!strings.Contains(err.Error(), "imex is required: /dev/nvidia-caps-imex-channels/channel1: not found") ||
		!isType[*RequiredError](err) {
		t.Errorf("error %v", err)
	}

	b = newExtrasFixture(t, []string{"imex"}, required)
	b.start()
	b.hasExtras("nvidia.com/imex-channel=1")
	testenv.Must(t, os.Rename(b.channel(), b.channel()+".away"))
	s := b.reconcile()
	b.wantDevices(s, count{unhealthy: 4})
	if why := reasons(s)[b.node.Machine().GPUs[0].UUID]; !strings.Contains(why, "imex is required") {
		t.Errorf("the devices are unhealthy because %q", why)
	}
	testenv.Must(t, os.Rename(b.channel()+".away", b.channel()))
	b.wantDevices(b.reconcile(), count{healthy: 4})
	b.hasExtras("nvidia.com/imex-channel=1")
}

// Another spec of the extra's kind makes only the names unavailable that engines cannot take from ours, and no GPU.
func TestAnotherSpecOfAnExtra(t *testing.T) {
	both := Extra{Extra: driver.IMEX, Channels: []int{0, 1}}
	for name, c := range map[string]struct {
		dir  int
		kind string
		name string
		want []string
	}{
		"takes a channel": {1, "nvidia.com/imex-channel", "1", []string{"nvidia.com/gds=all", "nvidia.com/imex-channel=0"}},
		"takes all of an extra": {
			1, "nvidia.com/gds", "all", []string{"nvidia.com/imex-channel=0", "nvidia.com/imex-channel=1"},
		},
		"is hidden by ours": {
			0, "nvidia.com/gds", "all",
			[]string{"nvidia.com/gds=all", "nvidia.com/imex-channel=0", "nvidia.com/imex-channel=1"},
		},
		"has none of our names": {
			1, "nvidia.com/gds", "x",
			[]string{"nvidia.com/gds=all", "nvidia.com/imex-channel=0", "nvidia.com/imex-channel=1"},
		},
		"takes a name of another one": {
			1, "nvidia.com/gdrcopy", "all",
			[]string{"nvidia.com/gds=all", "nvidia.com/imex-channel=0", "nvidia.com/imex-channel=1"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newExtrasFixture(t, []string{"gds", "imex"}, gds, both)
			all := []string{"nvidia.com/gds=all", "nvidia.com/imex-channel=0", "nvidia.com/imex-channel=1"}
			other := filepath.Join(b.dirs[c.dir], "other.json")
			given := func(s State, want []string) {
				t.Helper()
				b.wantDevices(s, count{healthy: 4})
				if got := extras(s); !slices.Equal(got, want) {
					t.Errorf("containers get %v, want %v", got, want)
				}
			}
			write := func() {
				b.foreign(other, c.name)
				edit(t, other, "nvidia.com/gpu", c.kind)
			}
			write()
			b.start()
			given(b.rec.State(), c.want)
			testenv.Must(t, os.Remove(other))
			given(b.reconcile(), all)
			write()
			given(b.reconcile(), c.want)
		})
	}
}

func TestAnotherSpecTakesAChannelThatIsRequired(t *testing.T) {
	b := newExtrasFixture(t, []string{"imex"}, required)
	b.start()
	other := filepath.Join(b.dirs[1], "imex.json")
	b.foreign(other, "1")
	edit(t, other, "nvidia.com/gpu", "nvidia.com/imex-channel")
	s := b.reconcile()
	b.wantDevices(s, count{unhealthy: 4})
	why := "imex is required: " + other + " also defines nvidia.com/imex-channel=1"
	if got := reasons(s)[b.uuids()[0]]; got != why || s.Ready() == nil {
		t.Errorf("the devices are unhealthy because %q; readiness: %v", got, s.Ready())
	}
	testenv.Must(t, os.Remove(other))
	b.wantDevices(b.reconcile(), count{healthy: 4})
	b.hasExtras("nvidia.com/imex-channel=1")
}

func TestExtrasWithoutSpecFiles(t *testing.T) {
	b := newFixtureOn(t, simtest.Node(t, "pcie-quad", simtest.Extras("gds")), func(o *Options) {
		o.Extras, o.Path = []Extra{gds}, ""
	})
	b.start()
	if got := extras(b.rec.State()); !slices.Equal(got, []string{"nvidia.com/gds=all"}) {
		t.Errorf("the state has %v", got)
	}
	if got := tree(t, b.dirs); len(got) > 0 {
		t.Errorf("there is %v", got)
	}
}

// A container that was given an extra cannot start again without its spec.
func TestTheSpecOfAnExtraThatIsNoLongerConfiguredStaysAndIsLogged(t *testing.T) {
	b := newExtrasFixture(t, []string{"gds"}, gds)
	b.start()
	testenv.Must(t, b.rec.Unlock())
	var log strings.Builder
	o := b.rec.opts
	o.Extras, o.Log = nil, slog.New(slog.NewTextHandler(&log, nil))
	b.rec = New(o)
	b.start()
	path := filepath.Join(b.dirs[1], "nvidia.com-gds.json")
	b.reconcile()
	if _, err := os.Stat(path); err != nil {
		t.Error(err)
	}
	want := "gds is not configured, and its CDI spec " + path + " stays until it is removed by hand"
	if n := strings.Count(log.String(), want); n != 1 {
		t.Errorf("%q was logged %d times:\n%s", want, n, &log)
	}
	if got := extras(b.rec.State()); len(got) > 0 {
		t.Errorf("containers get %v", got)
	}
}
