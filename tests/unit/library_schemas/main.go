// JSON schemas that a library of Go writes for usual shapes. It is the one that became invopop/jsonschema:
//
//	go mod init shapes && go get github.com/alecthomas/jsonschema@19bc6f2
//	go run main.go > go.json
package main

import (
	"encoding/json"
	"os"
	"time"

	"github.com/alecthomas/jsonschema"
)

type Plain struct {
	Path  string  `json:"path"`
	Count float64 `json:"count"`
}
type Optional struct {
	Path  string `json:"path"`
	Limit int    `json:"limit,omitempty"`
}
type Nullable struct {
	Path *string `json:"path"`
	Note *string `json:"note,omitempty"`
}
type Tagged struct {
	Mode  string `json:"mode" jsonschema:"enum=read,enum=write"`
	Limit int    `json:"limit" jsonschema:"minimum=1,maximum=100,default=10"`
	Email string `json:"email" jsonschema:"format=email,minLength=3"`
	Title string `json:"title" jsonschema:"title=A title,description=What it is,example=x"`
}
type List struct {
	Names []string `json:"names"`
}
type Lists struct {
	Rows [][]int `json:"rows"`
}
type Array struct {
	Point [2]float64 `json:"point"`
}
type Map struct {
	Env   map[string]string `json:"env"`
	Sizes map[string]int    `json:"sizes,omitempty"`
}
type Address struct {
	City string `json:"city"`
}
type Nested struct {
	Name    string  `json:"name"`
	Address Address `json:"address"`
}
type NestedPointer struct {
	Address *Address `json:"address,omitempty"`
}
type NestedList struct {
	Addresses []Address `json:"addresses"`
}
type Embedded struct {
	Address
	Name string `json:"name"`
}
type Numbers struct {
	A int8    `json:"a"`
	B uint64  `json:"b"`
	C float32 `json:"c"`
	D uint8   `json:"d"`
}
type Boolean struct {
	Deep bool `json:"deep"`
}
type Any struct {
	Payload any `json:"payload"`
}
type Raw struct {
	Payload json.RawMessage `json:"payload"`
}
type Times struct {
	At time.Time `json:"at"`
}
type Bytes struct {
	Data []byte `json:"data"`
}
type Hidden struct {
	Name   string `json:"name"`
	Secret string `json:"-"`
}
type Empty struct{}
type Tree struct {
	Value    string  `json:"value"`
	Children []*Tree `json:"children,omitempty"`
}

func main() {
	schemas := map[string]any{}
	for name, value := range map[string]any{
		"Plain": Plain{}, "Optional": Optional{}, "Nullable": Nullable{}, "Tagged": Tagged{},
		"List": List{}, "Lists": Lists{}, "Array": Array{}, "Map": Map{}, "Nested": Nested{},
		"NestedPointer": NestedPointer{}, "NestedList": NestedList{}, "Embedded": Embedded{},
		"Numbers": Numbers{}, "Boolean": Boolean{}, "Any": Any{}, "Raw": Raw{}, "Times": Times{},
		"Bytes": Bytes{}, "Hidden": Hidden{}, "Empty": Empty{}, "Tree": Tree{},
	} {
		schemas[name] = jsonschema.Reflect(value)
		expanded := jsonschema.Reflector{ExpandedStruct: true, AllowAdditionalProperties: true}
		if name != "Tree" { // whose reference would lead nowhere
			schemas[name+", expanded"] = expanded.Reflect(value)
		}
	}
	encoder := json.NewEncoder(os.Stdout)
	encoder.SetIndent("", " ")
	if err := encoder.Encode(map[string]any{"generator": "github.com/alecthomas/jsonschema 19bc6f2", "schemas": schemas}); err != nil {
		panic(err)
	}
}
