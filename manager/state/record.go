package state

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc64"
	"strconv"

	"gpu-cdi-plugin/manager/model"
)

// Everything is in one bucket of the database. The key of a placement is its place in the order of admission, with 8
// bytes, so that an added one changes the last page alone. The other records sort after them.
//
// bbolt's pages have no checksums. So each record begins with one over its key and its payload, and the record total
// has the number and the sum of the checksums of all others: it is written with each change, and shows that a page is
// missing or old.
const (
	keyVersion   = "version"
	keyTotal     = "total"
	keyResources = "resources"
	keyLoss      = "loss"

	placementKeySize = 8
	version          = 1
)

var bucket = []byte("state")

const sumSize = 8

func checksum(key, payload []byte) uint64 {
	table := crc64.MakeTable(crc64.ECMA) // which makes it once
	return crc64.Update(crc64.Update(0, table, key), table, payload)
}

// seal returns the value of a record, and its checksum.
func seal(key, payload []byte) ([]byte, uint64) {
	sum := checksum(key, payload)
	value := binary.BigEndian.AppendUint64(make([]byte, 0, sumSize+len(payload)), sum)
	return append(value, payload...), sum
}

// unseal returns the payload of a record with its checksum. ok is whether the checksum is right.
func unseal(key, value []byte) (payload []byte, sum uint64, ok bool) {
	if len(value) < sumSize {
		return nil, 0, false
	}
	payload, sum = value[sumSize:], binary.BigEndian.Uint64(value)
	return payload, sum, sum == checksum(key, payload)
}

// total is what all records but that of the total itself add up to, and the number of the transaction that wrote it. It
// is that of the meta page: so an old tree of pages, complete with its total, is noticed too.
type total struct{ count, sum, tx uint64 }

func parseTotal(payload []byte) total {
	number := func(i int) uint64 { return binary.BigEndian.Uint64(payload[i*sumSize:]) }
	return total{number(0), number(1), number(2)}
}

func (t *total) add(sum uint64) { t.count, t.sum = t.count+1, t.sum+sum }

func (t *total) remove(sum uint64) { t.count, t.sum = t.count-1, t.sum-sum }

func (t total) payload() []byte {
	payload := binary.BigEndian.AppendUint64(nil, t.count)
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(payload, t.sum), t.tx)
}

// placement is a placement with its place in the order of admission.
type placement struct {
	place uint64
	model.Placement
}

// content is what a file has.
type content struct {
	placements []placement // ascending by their place
	resources  []string
	loss       *Loss

	index map[string]stored // all records but the total, by their identity
	total total
}

// stored is a record that is in the file.
type stored struct {
	key []byte
	sum uint64
}

// last returns the last place of a placement.
func (c *content) last() uint64 {
	if len(c.placements) == 0 {
		return 0
	}
	return c.placements[len(c.placements)-1].place
}

// record is a record of a file. Its identity is its key; for a placement, whose key is its place, it is the pod's UID
// with a prefix.
type record struct {
	identity     string
	key, payload []byte
}

const podPrefix = "pod/"

func namedRecord(key string, payload []byte) record { return record{key, []byte(key), payload} }

// records returns all records but the total, in the order of their keys.
func (c *content) records() ([]record, error) {
	records := make([]record, 0, len(c.placements)+3)
	for _, p := range c.placements {
		payload, err := encode(&p.Placement)
		if err != nil {
			return nil, err
		}
		records = append(records, record{podPrefix + p.Pod.UID, placementKey(p.place), payload})
	}
	if c.loss != nil {
		payload, err := json.Marshal(c.loss)
		if err != nil {
			return nil, err
		}
		records = append(records, namedRecord(keyLoss, payload))
	}
	payload, err := json.Marshal(c.resources)
	if err != nil {
		return nil, err
	}
	return append(records, namedRecord(keyResources, payload),
		namedRecord(keyVersion, strconv.AppendInt(nil, version, 10))), nil
}

func placementKey(place uint64) []byte { return binary.BigEndian.AppendUint64(nil, place) }

// read adds a record to the content. The payload is copied where it is kept.
func (c *content) read(key, payload []byte, sum uint64) error {
	if len(key) == placementKeySize {
		p, err := decode(payload)
		c.placements = append(c.placements, placement{binary.BigEndian.Uint64(key), p})
		c.index[podPrefix+p.Pod.UID] = stored{bytes.Clone(key), sum}
		return err
	}
	c.index[string(key)] = stored{bytes.Clone(key), sum}
	switch string(key) {
	case keyResources:
		return json.Unmarshal(payload, &c.resources)
	case keyLoss:
		c.loss = &Loss{}
		return json.Unmarshal(payload, c.loss)
	case keyVersion:
		return parseVersion(payload)
	}
	return nil
}

// parseVersion returns ErrNewer for the version of a newer program.
func parseVersion(payload []byte) error {
	n, err := strconv.ParseUint(string(payload), 10, 32)
	if err == nil && n > version {
		return fmt.Errorf("%w: its format is %d, the newest known one is %d", ErrNewer, n, version)
	}
	return err
}
