package dra

import (
	"context"
	"log/slog"
	"sync"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	pluginregistration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"gpu-cdi-plugin/agent/apiserver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/node"
)

// Options are the parameters of a Driver. All are required but Changed.
type Options struct {
	// Name is the name of the driver, such as DefaultDriver.
	Name string
	API  *apiserver.Client
	Host host.Host
	// Records is the directory of the records of prepared claims. It must survive a reboot.
	Records string
	// RegistryDir is the kubelet's directory of plugin sockets, plugins_registry.
	RegistryDir string
	Ledger      Ledger
	// Changed is woken when Remarks may have another result.
	Changed wake.Chan
	Log     *slog.Logger
}

// Driver is the DRA driver of a node. It is an actor: call Run once. The other methods may be called concurrently.
type Driver struct {
	id        Identity
	host      host.Host
	publisher *Publisher
	claims    *claims
	socket    *socket

	mu       sync.Mutex
	snapshot *gpu.Snapshot
	roots    map[string]string // see PCIeRoots, of the snapshot
	omitted  []string          // see Slices
}

// New returns a Driver. It reads the records of prepared claims, and tells the ledger who holds which devices.
func New(o Options) (*Driver, error) {
	id := Identity{Driver: o.Name, Node: o.API.Node}
	prepared, err := newClaims(&claims{
		id: id, api: o.API, dir: o.Records, ledger: o.Ledger, log: o.Log,
		boot: host.ReadLine(o.Host.Proc("sys", "kernel", "random", "boot_id")),
	})
	if err != nil {
		return nil, err
	}
	d := &Driver{
		id: id, host: o.Host, claims: prepared,
		publisher: NewPublisher(o.API, id, o.Log), socket: newSocket(o.RegistryDir, o.Name, o.Log),
	}
	d.publisher.changed, d.socket.changed = o.Changed, o.Changed
	return d, nil
}

// Publish offers the devices of a state, and returns at once. When it returns, devices that are gone can no longer be
// prepared.
func (d *Driver) Publish(s node.State) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.claims.state.Store(&s)
	if s.Snapshot == nil {
		return // the slices of an earlier process stay
	}
	if s.Snapshot != d.snapshot {
		d.snapshot, d.roots = s.Snapshot, PCIeRoots(d.host, s.Snapshot)
	}
	var list []Slice
	list, d.omitted = Slices(d.id, &s, d.roots)
	d.publisher.Publish(list)
}

// Run serves the kubelet and publishes until ctx ends. It returns earlier with fileio.ErrHeld if another instance
// serves the kubelet.
func (d *Driver) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return d.publisher.Run(ctx) })
	g.Go(func() error {
		return d.socket.run(ctx, func(s *grpc.Server) {
			service := &server{claims: d.claims, socket: d.socket}
			drav1.RegisterDRAPluginServer(s, service)
			pluginregistration.RegisterRegistrationServer(s, service)
		})
	})
	return g.Wait()
}

// Remarks says what is wrong: devices that are not in slices, slices that are not published, a kubelet that has not
// registered the driver, and claims whose devices are gone or unknown.
func (d *Driver) Remarks() []node.Remark {
	var list []node.Remark
	d.mu.Lock()
	for _, text := range d.omitted {
		list = append(list, node.Remark{Key: "DRA " + text, Level: slog.LevelWarn, Text: text})
	}
	d.mu.Unlock()
	if why := d.publisher.Reason(); why != "" {
		list = append(list, node.Remark{
			Key: "ResourceSlices", Level: slog.LevelError, Text: "the ResourceSlices of the node cannot be published: " + why,
		})
	}
	if why := d.socket.currentReason(); why != "" {
		list = append(list, node.Remark{
			Key: "DRA registration", Level: slog.LevelError, Text: "the DRA driver is not registered with the kubelet: " + why,
		})
	}
	return append(list, d.claims.remarks()...)
}
