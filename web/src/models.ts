// Holds the names of the server's models, and the one that will answer next.
import { get } from "./api";
import { Store } from "./store";

const PLACE = "entropykv.model";

interface Models {
  // Names of all models, if the server has several.
  names: string[];
  // null: the server has a single model, which needs no name.
  chosen: string | null;
}

export const models = new Store<Models>({ names: [], chosen: null });

export async function learnModels(first: string): Promise<void> {
  const { data } = await get<{ data: { id: string; status?: object }[] }>("v1/models");
  // A server with a single model does not list states.
  const names = data.filter((each) => each.status).map((each) => each.id);
  const before = models.value.chosen ?? localStorage.getItem(PLACE);
  const chosen = before !== null && names.includes(before) ? before : first;
  models.set({ names, chosen: names.length ? chosen : null });
}

export function chooseModel(name: string): void {
  localStorage.setItem(PLACE, name);
  models.update({ chosen: name });
}

// Adds the model to a query, if the server has several.
export function withModel(query: Record<string, string>): URLSearchParams {
  const { chosen } = models.value;
  return new URLSearchParams(chosen === null ? query : { ...query, model: chosen });
}
