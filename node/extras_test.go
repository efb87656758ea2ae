package node

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/internal/fileid"
	"gpu-cdi-plugin/internal/lock"
	"gpu-cdi-plugin/sim/simtest"
)

// newExtrasBed is an inventory on a node that has what is named, and one that keeps the extras.
func newExtrasBed(t *testing.T, has []string, extras ...Extra) *bed {
	t.Helper()
	b := newBedOn(t, simtest.Node(t, "pcie-quad", simtest.Extras(has...)), func(o *Options) { o.Extras = extras })
	return b
}

var (
	gds      = Extra{Extra: cdi.GDS}
	channel1 = Extra{Extra: cdi.IMEX, Channels: []int{1}}
	required = Extra{Extra: cdi.IMEX, Channels: []int{1}, Required: true}
)

func (b *bed) channel() string {
	return filepath.Join(b.node.Root(), "dev/nvidia-caps-imex-channels/channel1")
}

// extras are the qualified names of the extras' devices in a state.
func extras(s State) []string {
	var names []string
	for _, spec := range s.Extras {
		for i := range spec.Devices {
			names = append(names, spec.Kind+"="+spec.Devices[i].Name)
		}
	}
	return names
}

func (b *bed) hasExtras(want ...string) {
	b.t.Helper()
	if got := extras(b.inv.State()); !slices.Equal(got, want) {
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
	if err := b.inv.SpecHas(want...); err != nil {
		b.t.Error(err)
	}
}

func TestExtrasThatTheNodeHasAreInSpecsOfTheirOwn(t *testing.T) {
	b := newExtrasBed(t, []string{"gds", "imex"}, gds, Extra{Extra: cdi.GDRCopy}, channel1)
	b.start()
	b.counts(b.inv.State(), 4, 0)
	b.hasExtras("nvidia.com/gds=all", "nvidia.com/imex-channel=1")
	uuid := cdi.DefaultKind + "=" + b.node.Machine().GPUs[0].UUID
	if err := b.inv.SpecHas(uuid, "nvidia.com/gds=all"); err != nil {
		t.Error(err)
	}
	err := b.inv.SpecHas(uuid, "nvidia.com/imex-channel=0", "nvidia.com/gdrcopy=all")
	if err == nil || !strings.Contains(err.Error(), "does not have nvidia.com/imex-channel=0") ||
		!strings.Contains(err.Error(), "nvidia.com/gdrcopy=all") || strings.Contains(err.Error(), uuid) {
		t.Errorf("error %v", err)
	}
}

func TestExtrasComeAndGo(t *testing.T) {
	b := newExtrasBed(t, []string{"gds", "imex"}, gds, channel1)
	b.start()
	must(t, os.Rename(b.channel(), b.channel()+".away"))
	b.counts(b.reconcile(), 4, 0)
	b.hasExtras("nvidia.com/gds=all")
	must(t, os.Rename(b.channel()+".away", b.channel()))
	b.counts(b.reconcile(), 4, 0)
	b.hasExtras("nvidia.com/gds=all", "nvidia.com/imex-channel=1")
}

func TestRunNoticesExtras(t *testing.T) {
	for name, change := range map[string]func(b *bed) error{
		"a channel goes":     func(b *bed) error { return os.Remove(b.channel()) },
		"a setting goes":     func(b *bed) error { return os.Remove(filepath.Join(b.node.Root(), "etc/cufile.json")) },
		"a spec is deleted":  func(b *bed) error { return os.Remove(filepath.Join(b.dirs[1], "nvidia.com-gds.json")) },
		"a spec is replaced": func(b *bed) error { return os.WriteFile(filepath.Join(b.dirs[1], "nvidia.com-gds.json"), nil, 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newExtrasBed(t, []string{"gds", "imex"}, gds, channel1)
			b.inv.opts.Poll = 5 * time.Millisecond
			b.start()
			spec := filepath.Join(b.dirs[1], "nvidia.com-gds.json")
			before := [2]fileid.ID{fileid.Of(spec), fileid.Of(filepath.Join(b.dirs[1], "nvidia.com-imex-channel.json"))}
			b.run()
			must(t, change(b))
			for late := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
				now := [2]fileid.ID{fileid.Of(spec), fileid.Of(filepath.Join(b.dirs[1], "nvidia.com-imex-channel.json"))}
				if _, err := cdi.ReadFile(spec); err == nil && now != before {
					break
				}
				if time.Now().After(late) {
					t.Fatal("nothing happened")
				}
			}
		})
	}
}

func TestARequiredChannelThatIsMissing(t *testing.T) {
	b := newExtrasBed(t, nil, required)
	err := b.inv.Start(t.Context())
	if err == nil || !strings.Contains(err.Error(), "imex is required: /dev/nvidia-caps-imex-channels/channel1: not found") ||
		!strings.Contains(exit.HintOf(err), "imex.required") {
		t.Errorf("error %v", err)
	}

	b = newExtrasBed(t, []string{"imex"}, required)
	b.start()
	b.hasExtras("nvidia.com/imex-channel=1")
	must(t, os.Rename(b.channel(), b.channel()+".away"))
	s := b.reconcile()
	b.counts(s, 0, 4)
	if why := health(s)[b.node.Machine().GPUs[0].UUID]; !strings.Contains(why, "imex is required") {
		t.Errorf("the devices are unhealthy because %q", why)
	}
	must(t, os.Rename(b.channel()+".away", b.channel()))
	b.counts(b.reconcile(), 4, 0)
	b.hasExtras("nvidia.com/imex-channel=1")
}

// Another spec of the extra's kind costs what engines cannot take from ours, and no GPU.
func TestAnotherSpecOfAnExtra(t *testing.T) {
	both := Extra{Extra: cdi.IMEX, Channels: []int{0, 1}}
	for name, c := range map[string]struct {
		dir  int
		kind string
		name string
		want []string
	}{
		"takes a channel":             {1, "nvidia.com/imex-channel", "1", []string{"nvidia.com/gds=all", "nvidia.com/imex-channel=0"}},
		"takes all of an extra":       {1, "nvidia.com/gds", "all", []string{"nvidia.com/imex-channel=0", "nvidia.com/imex-channel=1"}},
		"is hidden by ours":           {0, "nvidia.com/gds", "all", []string{"nvidia.com/gds=all", "nvidia.com/imex-channel=0", "nvidia.com/imex-channel=1"}},
		"has none of our names":       {1, "nvidia.com/gds", "x", []string{"nvidia.com/gds=all", "nvidia.com/imex-channel=0", "nvidia.com/imex-channel=1"}},
		"takes a name of another one": {1, "nvidia.com/gdrcopy", "all", []string{"nvidia.com/gds=all", "nvidia.com/imex-channel=0", "nvidia.com/imex-channel=1"}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newExtrasBed(t, []string{"gds", "imex"}, gds, both)
			all := []string{"nvidia.com/gds=all", "nvidia.com/imex-channel=0", "nvidia.com/imex-channel=1"}
			other := filepath.Join(b.dirs[c.dir], "other.json")
			given := func(s State, want []string) {
				t.Helper()
				b.counts(s, 4, 0)
				if got := extras(s); !slices.Equal(got, want) {
					t.Errorf("containers get %v, want %v", got, want)
				}
				must(t, b.inv.SpecHas(extras(s)...))
			}
			write := func() {
				b.foreign(other, c.name)
				edit(t, other, "nvidia.com/gpu", c.kind)
			}
			write()
			b.start()
			given(b.inv.State(), c.want)
			must(t, os.Remove(other))
			given(b.reconcile(), all)
			write()
			given(b.reconcile(), c.want)
		})
	}
}

func TestAnotherSpecTakesAChannelThatIsRequired(t *testing.T) {
	b := newExtrasBed(t, []string{"imex"}, required)
	b.start()
	other := filepath.Join(b.dirs[1], "imex.json")
	b.foreign(other, "1")
	edit(t, other, "nvidia.com/gpu", "nvidia.com/imex-channel")
	s := b.reconcile()
	b.counts(s, 0, 4)
	why := "imex is required: " + other + " defines nvidia.com/imex-channel=1 too"
	if got := health(s)[b.uuids()[0]]; got != why || s.Ready() == nil {
		t.Errorf("the devices are unhealthy because %q; readiness: %v", got, s.Ready())
	}
	must(t, os.Remove(other))
	b.counts(b.reconcile(), 4, 0)
	b.hasExtras("nvidia.com/imex-channel=1")
}

func TestTheSpecsOfExtrasInTheStateStay(t *testing.T) {
	b := newExtrasBed(t, []string{"gds", "imex"}, gds, channel1)
	b.start()
	before := b.inv.State().Extras
	b.reconcile()
	if now := b.inv.State().Extras; len(now) != 2 || !slices.Equal(now, before) {
		t.Errorf("other specs, %v, are in the state, where nothing has changed since %v", now, before)
	}
}

func TestExtrasWithoutSpecFiles(t *testing.T) {
	b := newBedOn(t, simtest.Node(t, "pcie-quad", simtest.Extras("gds")), func(o *Options) {
		o.Extras, o.Path = []Extra{gds}, ""
	})
	b.start()
	if got := extras(b.inv.State()); !slices.Equal(got, []string{"nvidia.com/gds=all"}) {
		t.Errorf("the state has %v", got)
	}
	if got := tree(t, b.dirs); len(got) > 0 {
		t.Errorf("there is %v", got)
	}
}

// A pod that was given an extra needs its spec when a container of it starts again, and what somebody else wrote is not
// ours to remove.
func TestTheSpecOfAnExtraThatIsConfiguredNoLonger(t *testing.T) {
	nobody := func(string) (bool, error) { return false, nil }
	for name, c := range map[string]struct {
		given func(string) (bool, error)
		wait  time.Duration                   // since the start
		meet  func(t *testing.T, spec string) // when there is no plugin
		stays bool
	}{
		"goes":                             {nobody, time.Hour, nil, false},
		"stays when a pod has it":          {func(kind string) (bool, error) { return kind == "nvidia.com/imex-channel", nil }, time.Hour, nil, true},
		"stays when nobody knows":          {func(string) (bool, error) { return false, errors.New("no checkpoint") }, time.Hour, nil, true},
		"stays when nobody can be asked":   {nil, time.Hour, nil, true},
		"stays when that may not be known": {nobody, 0, nil, true},
		"stays when it was written by hand since": {nobody, time.Hour, func(t *testing.T, path string) {
			spec, err := cdi.ReadFile(path)
			must(t, err)
			must(t, cdi.WriteFile(path, spec))
		}, true},
		"stays when it was changed": {nobody, time.Hour, func(t *testing.T, path string) {
			text, err := os.ReadFile(path)
			must(t, err)
			must(t, os.WriteFile(path, bytes.Replace(text, []byte("channel1\""), []byte("other\""), 1), 0o644))
		}, true},
		"stays when it was changed to what could be ours": {nobody, time.Hour, func(t *testing.T, path string) {
			text, err := os.ReadFile(path)
			must(t, err)
			text = bytes.ReplaceAll(text, []byte("channel1\""), []byte("channel2\""))
			must(t, os.WriteFile(path, bytes.Replace(text, []byte(`"name": "1"`), []byte(`"name": "2"`), 1), 0o644))
			spec, err := cdi.ReadFile(path)
			must(t, err)
			if !cdi.IMEX.Wrote(spec) {
				t.Fatalf("the spec is one that is not ours:\n%s", text)
			}
		}, true},
		"stays when another instance keeps it": {nobody, time.Hour, func(t *testing.T, path string) {
			l, err := lock.Acquire(lockOf(path))
			must(t, err)
			t.Cleanup(func() { must(t, l.Release()) })
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			b := newExtrasBed(t, []string{"gds", "imex"}, gds, channel1)
			b.start()
			b.hasExtras("nvidia.com/gds=all", "nvidia.com/imex-channel=1")
			must(t, b.inv.release())
			spec := filepath.Join(b.dirs[1], "nvidia.com-imex-channel.json")
			if c.meet != nil {
				c.meet(t, spec)
			}
			before := tree(t, b.dirs)
			b.inv.opts.Extras, b.inv.opts.Given = []Extra{gds}, c.given
			b.inv = New(b.inv.opts)
			b.start()
			b.inv.began = time.Now().Add(-c.wait)
			b.reconcile()
			if got := tree(t, b.dirs); slices.Contains(got, spec) != c.stays {
				t.Errorf("there were %v, and there are %v", before, got)
			}
			if got := tree(t, b.dirs); !slices.Contains(got, filepath.Join(b.dirs[1], "nvidia.com-gds.json")) {
				t.Error("the spec of the other extra is gone")
			}
		})
	}
}

// Between the look at a spec and its removal somebody may write one of his own.
func TestWhatSomebodyWroteMeanwhileStays(t *testing.T) {
	b := newExtrasBed(t, []string{"gds"}, gds)
	b.start()
	must(t, b.inv.release())
	path := filepath.Join(b.dirs[1], "nvidia.com-gds.json")
	spec, err := cdi.ReadFile(path)
	must(t, err)
	must(t, cdi.WriteFile(path, spec))
	if removed, err := removeUnlessKept(path); removed || err != nil {
		t.Errorf("removed: %t, error %v", removed, err)
	}
	mark(path, spec)
	if removed, err := removeUnlessKept(path); !removed || err != nil {
		t.Errorf("one of ours is removed: %t, error %v", removed, err)
	}
}

// Who configures an extra no longer hears what becomes of its spec.
func TestWhatIsSaidOfAnExtraThatIsConfiguredNoLonger(t *testing.T) {
	b := newExtrasBed(t, []string{"gds", "imex"}, gds, channel1)
	b.start()
	must(t, b.inv.release())
	b.inv.opts.Extras = []Extra{gds}
	var log strings.Builder
	b.inv.opts.Log = slog.New(slog.NewTextHandler(&log, nil))
	b.inv = New(b.inv.opts)
	b.start()
	path := filepath.Join(b.dirs[1], "nvidia.com-imex-channel.json")
	if got := strings.Count(log.String(), `msg="imex is not configured; its spec `+path+` stays as long as a pod may have been given it"`); got != 1 {
		t.Errorf("the log says:\n%s", &log)
	}
}
